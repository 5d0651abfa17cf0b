package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/config"
)

// S-125
func TestImagesList(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		which imageList
		want  string // part of the list
		count int
	}{
		{imageList{purpose: forCluster}, config.DefaultEtcdImage, 9},
		{imageList{purpose: forInstall}, "ghcr.io/garboard-os/installer:", 2},
		{imageList{purpose: forInstall}, config.DefaultPauseImage, 2},
		{imageList{purpose: forUpgrade, to: "1.36.3"}, "registry.k8s.io/kube-proxy:v1.36.3", 5},
	} {
		got, err := tc.which.images(&app{}, nil)
		if err != nil || len(got) != tc.count || !strings.Contains(strings.Join(got, "\n"), tc.want) {
			t.Errorf("%+v: %q, %v", tc.which, got, err)
		}
	}
	dir := t.TempDir()
	for name, kind := range map[string]config.MachineType{"controlplane.yaml": config.ControlPlane, "worker.yaml": config.Worker} {
		c, err := config.Generate(config.Options{Endpoint: "https://10.5.0.2:6443", Type: kind})
		if err != nil {
			t.Fatal(err)
		}
		c.Machine.Kubelet.Image = "my.registry/kubelet:v1.36.3"
		text, err := c.Encode()
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	configs := []string{filepath.Join(dir, "controlplane.yaml"), filepath.Join(dir, "worker.yaml")}
	got, err := (&imageList{purpose: forUpgrade, to: "1.37.2", configs: configs}).images(&app{err: io.Discard}, nil)
	if err != nil || len(got) != 5 || got[0] != config.DefaultAPIServerImage || got[4] != "my.registry/kubelet:v1.37.2" {
		t.Errorf("for an upgrade, of configurations: %q, %v", got, err)
	}
	for _, bad := range []imageList{{purpose: forUpgrade, to: "1.2.3"}, {purpose: forCluster, to: "1.36.3"}, {purpose: forInstall, configs: []string{"/nowhere"}}} {
		if _, err := bad.images(&app{}, nil); err == nil {
			t.Errorf("%+v: no error", bad)
		}
	}
	if got, err := (&imageList{purpose: forCluster}).images(&app{}, []string{"a:1", "b:1", "a:1"}); err != nil || len(got) != 2 {
		t.Errorf("%q, %v", got, err)
	}
}
