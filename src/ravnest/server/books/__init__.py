"""What can be asked of the store and written into it, one module a subject."""
