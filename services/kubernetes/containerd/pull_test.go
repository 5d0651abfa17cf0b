package containerd

import (
	"errors"
	"strings"
	"testing"
)

func TestPullErrorOfAFullDisk(t *testing.T) {
	t.Parallel()
	full := errors.New("failed to extract layer: write /var/lib/containerd/x: no space left on device")
	got := pullError("registry.example/etcd:1", full).Error()
	for _, want := range []string{"the disk is full: /var (EPHEMERAL)", "MiB for image registry.example/etcd:1", "larger disk"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q isn't in: %s", want, got)
		}
	}
	other := errors.New("not found")
	if got := pullError("registry.example/etcd:1", other); !errors.Is(got, other) || !strings.Contains(got.Error(), "machine.registries.mirrors") {
		t.Errorf("another error: %v", got)
	}
}
