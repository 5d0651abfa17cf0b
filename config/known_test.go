package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Only keys that this release doesn't know are left out; comments and all else stay as they are.
func TestKnown(t *testing.T) {
	t.Parallel()
	text := document(t, Worker)
	newer := strings.Replace(text, "machine:\n", "machine:\n  cooling: # newer\n    fans: 2\n", 1) + "later: [1, 2]\n"
	newer = with(newer, "machine", "time: {servers: [pool.example], zone: UTC}")
	known, unknown, err := Known("test.yaml", []byte(newer))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"later", "machine.cooling", "machine.time.zone"}, unknown); diff != "" {
		t.Error(diff)
	}
	c, _, err := Load("test.yaml", known)
	if err != nil || c.Machine.Time.Servers[0] != "pool.example" {
		t.Errorf("%+v, %v:\n%s", c, err, known)
	}
	for _, text := range []string{"a: [", "", "- a", "machine: {time: {servers: {}}}\n"} {
		if known, unknown, err := Known("test.yaml", []byte(text)); err == nil && (len(unknown) > 0 || string(known) != text) {
			t.Errorf("%q: %q, %v", text, known, unknown)
		}
	}
}
