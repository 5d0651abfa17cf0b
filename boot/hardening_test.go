package boot

import (
	"bytes"
	"testing"

	"gopkg.in/yaml.v3"
)

// All that is in the file is read, each setting once.
func TestSettings(t *testing.T) {
	t.Parallel()
	all := settings
	dec := yaml.NewDecoder(bytes.NewReader(settingsText))
	dec.KnownFields(true)
	if err := dec.Decode(&all); err != nil {
		t.Error(err)
	}
	if len(HostPaths) == 0 {
		t.Error("there are no host paths")
	}
	seen := map[string]bool{}
	for i, table := range [][]Setting{HardeningArguments, HardeningParameters, KubeletParameters, NodeParameters} {
		if len(table) == 0 {
			t.Errorf("table %d is empty", i)
		}
		for _, s := range table {
			if s.Name == "" || s.Why == "" || seen[s.Name] || s.Value == "" && s.Name != "slab_nomerge" {
				t.Errorf("%+v", s)
			}
			seen[s.Name] = true
		}
	}
}
