"""The long runs of `make soak`: damaged inputs by the ten thousand, kills, and a page under load."""
