"""Serving the actor. Nothing is here yet."""
