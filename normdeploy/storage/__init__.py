"""Files and folders, which are read as untrusted input and written atomically, and the record of a file's export."""
