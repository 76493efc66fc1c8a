"""The papers' experiments in virtual time, beside what the papers say of them."""
