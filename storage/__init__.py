"""Storage: a leaf room. PostgreSQL connections, ordered migrations, and artifacts on a file system."""
