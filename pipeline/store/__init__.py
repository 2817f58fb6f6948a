"""The store on disk: what is written into it, and the read side. Nothing here decodes an image."""
