"""`servekit top` and `servekit chat`: clients of a server that know it only by its doors, and import none of it."""
