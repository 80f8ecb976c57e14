"""An HTTP/1.1 client for the two hot paths: what goes to engines, and what is read from them."""
