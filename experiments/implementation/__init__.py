"""What each program does once its options are read: torch and the rest are imported here, not by the program, whose
`--help` and wrong options are answered at once."""
