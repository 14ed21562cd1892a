"""counterpoise."""
