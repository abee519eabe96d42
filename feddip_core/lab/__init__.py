"""Tools for notebooks: explorer, exercises, live curves and charts."""
