"""Stage bundles, node specs and trained weights on disk."""
