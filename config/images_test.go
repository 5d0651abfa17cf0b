package config

import "testing"

// The most specific rule is for an image, however the name of its registry is spelled.
func TestRule(t *testing.T) {
	rules := func(prefixes ...string) (i Images) {
		for _, p := range prefixes {
			i.Verify = append(i.Verify, ImageRule{Prefix: p})
		}
		return i
	}
	some := rules("registry.example/", "registry.example:443/team/", "Other.example:443/", "other.example:5000/")
	all := some
	all.Verify = append([]ImageRule{{Prefix: EveryImage}}, some.Verify...)
	for image, want := range map[string]string{
		"registry.example/a:1":          "registry.example/",
		"registry.example:443/a:1":      "registry.example/",
		"registry.example/team/a:443":   "registry.example:443/team/",
		"REGISTRY.example:443/team/a:1": "registry.example:443/team/",
		"other.example/a:1":             "Other.example:443/",
		"other.example:5000/a:1":        "other.example:5000/",
		"other.example:5001/a:1":        "",
		"registry.example.org/a:1":      "",
		"registry.example:4430/a:1":     "",
	} {
		for _, c := range []struct {
			rules Images
			want  string
		}{{some, want}, {all, map[bool]string{true: EveryImage, false: want}[want == ""]}} {
			got := ""
			if rule := c.rules.Rule(image); rule != nil {
				got = rule.Prefix
			}
			if got != c.want {
				t.Errorf("%s: rule %q of %d, want %q", image, got, len(c.rules.Verify), c.want)
			}
		}
	}
}
