"""Choice of the clients that train next."""
