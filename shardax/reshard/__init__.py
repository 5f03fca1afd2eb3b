"""From one layout to another: the cheapest path, its steps, and how they run on shards."""
