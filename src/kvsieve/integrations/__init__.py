"""kvsieve inside other engines."""
