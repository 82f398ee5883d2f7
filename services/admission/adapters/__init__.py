"""What admission touches of the world outside."""
