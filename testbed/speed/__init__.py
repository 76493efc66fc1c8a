"""How fast this host and other machines are in the work that training consists of."""
