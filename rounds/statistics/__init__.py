"""What votes prove: pure functions of arrays and counts, each with its source; nothing here reads or writes."""
