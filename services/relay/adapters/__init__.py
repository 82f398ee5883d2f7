"""Files for Envoy, and Envoy's judgement of them."""
