"""The pure part of relay: upstreams, routes, live endpoints, and what Envoy is told about them."""
