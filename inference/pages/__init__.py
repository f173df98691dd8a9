"""Pages of documents, read by a model: the grammar and the end of what it writes, and the document of it."""
