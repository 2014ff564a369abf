"""Write plans as one HTML file with charts."""
