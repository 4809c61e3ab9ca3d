"""How flows are drawn; :mod:`flowrl.display` is the way in."""
