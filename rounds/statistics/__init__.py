"""What votes prove: pure functions of arrays and counts, each with its source; no module here reads or writes anything."""
