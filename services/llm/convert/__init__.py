"""Model files made from the weights that packages carry; run at set-up, never by the service."""
