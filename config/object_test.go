package config

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/config/fuzzdata"
)

// The JSON for the API server means the same as the document.
func TestObjectKeepsItsMeaning(t *testing.T) {
	const text = `{z: [1, -2, 1.5, 0x10, 12345678901234567890, true, null, "true", yes, "1e3", 2001-01-01, "", "a\nb "], a: {"1": {}}, l: []}`
	c, _ := accepted(t, with(document(t, Worker), "cluster", "apiServer: {admissionControl: [{name: A, configuration: "+text+"}]}"))
	o := c.Cluster.APIServer.AdmissionControl[0].Configuration
	want(t, `{"a":{"1":{}},"l":[],"z":[1,-2,1.5,16,12345678901234567890,true,null,"true","yes","1e3","2001-01-01","","a\nb "]}`, string(o))
	written, err := yaml.Marshal(map[string]any{"x": o})
	if err != nil {
		t.Fatal(err)
	}
	var again struct{ X any }
	if err := yaml.Unmarshal(written, &again); err != nil {
		t.Fatal(err)
	}
	back, err := json.Marshal(again.X)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(o), string(back)); diff != "" {
		t.Errorf("%s is written as\n%s", o, written)
	}
}

// Nesting and aliases cost no more here than elsewhere in a document.
func TestCostlyObjects(t *testing.T) {
	for name, configuration := range map[string]string{
		"deep":       strings.Repeat("{a: ", maxDepth+1) + "1" + strings.Repeat("}", maxDepth+1),
		"in itself":  "&x {a: *x}",
		"multiplied": "{a: &a [" + strings.Repeat("x, ", 900) + "], b: &b [" + strings.Repeat("*a, ", 900) + "], c: [" + strings.Repeat("*b, ", 900) + "]}",
	} {
		doc := with(document(t, Worker), "cluster", "apiServer: {admissionControl: [{name: A, configuration: "+configuration+"}]}")
		fuzzdata.Bounded(t, func() {
			if _, _, err := Load("test.yaml", []byte(doc)); err == nil {
				t.Errorf("%s is accepted", name)
			}
		})
	}
}
