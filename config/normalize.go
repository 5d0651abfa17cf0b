package config

// joinAlias is how older files call a worker.
const joinAlias = "join"

// loAlias is how some files call the loopback interface.
const loAlias, loopback = "lo0", "lo"

// normalize replaces deprecated spellings of values, with a warning each, so
// that the rest of the system knows one spelling only. Deprecated names of
// fields are the decoder's business (see renamed and lenientLists).
func normalize(c *Config, r *report) {
	if c.Machine.Type == joinAlias {
		r.warn(at("machine", "type"), "%q is an alias; use %q", joinAlias, Worker)
		c.Machine.Type = Worker
	}
	for i := range c.Machine.Network.Interfaces {
		if in := &c.Machine.Network.Interfaces[i]; in.Name == loAlias {
			r.warn(at("machine", "network", "interfaces", i, "interface"), "%q is an alias; Linux calls it %q", loAlias, loopback)
			in.Name = loopback
		}
	}
}
