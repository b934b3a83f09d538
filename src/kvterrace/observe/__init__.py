"""Looking at a store from outside."""
