"""What a provider's machine does around its nodes: which live here, starting and ending them."""
