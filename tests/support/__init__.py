"""What test modules share: small checkpoints and files, servers, pictures, and processes that tests start."""
