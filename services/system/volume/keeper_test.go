package volume

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/system/disk"
)

// storey is a layer that makes a path of the one below it.
type storey struct {
	name string
	said *[]string
	is   bool // it is there
	fail error
}

func (s *storey) Describe() string { return "a " + s.name }
func (s *storey) Close() error     { *s.said = append(*s.said, "close "+s.name); return s.fail }

func (s *storey) On(below string) (bool, error) {
	*s.said = append(*s.said, s.name+" on "+below)
	return s.is, nil
}

func (s *storey) Create(_ context.Context, below string) error {
	*s.said = append(*s.said, "create "+s.name+" on "+below)
	return nil
}

func (s *storey) Open(_ context.Context, below string) (string, error) {
	*s.said = append(*s.said, "open "+s.name+" on "+below)
	return "/" + s.name, s.fail
}

// The layers of a volume are opened in their order, each on what the one below it has opened, and closed in the reverse
// order.
func TestChainOfLayers(t *testing.T) {
	t.Parallel()
	var said []string
	layers := map[string]*storey{}
	v := Volume{Volume: boot.Volume{Label: "STATE", Dir: "/top"}}
	for _, name := range []string{"partition", "cipher", "top"} {
		layers[name] = &storey{name: name, said: &said, is: true}
		v.Layers = append(v.Layers, layers[name])
	}
	k := &Keeper{Log: slog.New(slog.DiscardHandler), Disks: &disk.Inventory{Is: func(string) bool { return false }}}
	d := disk.Disk{Identity: disk.Identity{Path: "/disk"}}
	says := func(err error, want ...string) {
		t.Helper()
		if err != nil || !slices.Equal(said, want) {
			t.Errorf("%q, %v, want %q", said, err, want)
		}
		said = nil
	}
	says(k.format(t.Context(), d, v).do(),
		"create partition on /disk", "open partition on /disk", "create cipher on /partition", "open cipher on /partition", "create top on /cipher")
	says(k.Open(t.Context(), d, v), "open partition on /disk", "open cipher on /partition", "open top on /cipher")
	if !k.Mounted("/top") {
		t.Error("it isn't mounted")
	}
	// What is mounted isn't opened again.
	says(k.Open(t.Context(), d, v))
	k.Close()
	says(nil, "close top", "close cipher", "close partition")
	if k.Mounted("/top") {
		t.Error("it is mounted")
	}

	// One that is missing is to be made if there are only zeros, and the layers above it aren't asked.
	for content, want := range map[string]string{"\x00": "", "?": "holds unknown data in its partition STATE, where a cipher was"} {
		layers["partition"].name, layers["cipher"].is = filepath.Join(t.TempDir(), "partition"), false
		if err := os.WriteFile("/"+layers["partition"].name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		missing, err := k.Missing(t.Context(), d, v)
		if missing != (want == "") || (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: missing %v, %v", content, missing, err)
		}
		if slices.ContainsFunc(said, func(s string) bool { return strings.HasPrefix(s, "top on") }) {
			t.Errorf("%q", said)
		}
	}
	k.Close()
	layers["cipher"].fail = errors.New("wrong key")
	if err := k.Open(t.Context(), d, v); err == nil || err.Error() != "open STATE of /disk: wrong key" || k.Mounted("/top") {
		t.Error(err)
	}
}
