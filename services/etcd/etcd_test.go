package etcd

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// S-212, S-213, S-224: only a node of type init starts a cluster from nothing;
// with data, every control plane goes on.
func TestS224WhoMayStartFromNothing(t *testing.T) {
	t.Parallel()
	empty, full := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(full, "member"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		machine config.MachineType
		dir     string
		want    string // part of the error, "" for none
	}{
		{config.Init, empty, ""},
		{config.Init, full, ""},
		{config.ControlPlane, full, ""},
		{config.ControlPlane, empty, `is empty and machine.type is "controlplane"`},
	} {
		err := mayStart(tt.machine, tt.dir)
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("%s, %s: %v", tt.machine, tt.dir, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("%s, %s: error %v, want one with %q", tt.machine, tt.dir, err, tt.want)
		}
	}
	if err := mayStart(config.Init, filepath.Join(empty, "gone")); err == nil {
		t.Error("a data directory that can't be read counts as empty")
	}
}

// S-074: extra arguments win, and the order is fixed.
func TestS074Arguments(t *testing.T) {
	t.Parallel()
	args := arguments("cp-1", netip.MustParseAddr("10.5.0.2"), map[string]string{"snapshot-count": "5000", "auto-compaction-retention": "1h"})
	if args[0] != "etcd" || !slices.IsSorted(args[1:]) {
		t.Errorf("not in a fixed order: %q", args)
	}
	for _, want := range []string{
		"--name=cp-1", "--initial-cluster=cp-1=https://10.5.0.2:2380", "--snapshot-count=5000", "--auto-compaction-retention=1h",
		"--client-cert-auth=true", "--peer-client-cert-auth=true", "--listen-client-urls=https://127.0.0.1:2379,https://10.5.0.2:2379",
	} {
		if !slices.Contains(args, want) {
			t.Errorf("%s is missing in %q", want, args)
		}
	}
	if v6 := arguments("a", netip.MustParseAddr("fd00::2"), nil); !slices.Contains(v6, "--advertise-client-urls=https://[fd00::2]:2379") {
		t.Errorf("IPv6 address without brackets in %q", v6)
	}
}
