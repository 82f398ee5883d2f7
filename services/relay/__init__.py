"""relay: which upstreams exist and how Envoy reaches them."""
