"""``canvax serve``: models behind HTTP, for programs that know the APIs of others, and a page for people."""
