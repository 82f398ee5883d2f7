"""The REST routes: HTTP only. What a request means is decided in facade.translate and behind it."""
