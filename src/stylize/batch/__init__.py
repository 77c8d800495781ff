"""Folders: what there is to paint, what is done already, and who paints it."""
