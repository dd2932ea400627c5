"""Where tokens lie: the pool of pages (`pool`) and the block table of a cache's rows (`table`)."""
