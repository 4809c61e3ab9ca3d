"""One file an engine; a heavy library is imported in its engine's file alone."""
