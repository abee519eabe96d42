"""Tables, figures and theory, made from the records of runs."""
