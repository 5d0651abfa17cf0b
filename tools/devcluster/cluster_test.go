package devcluster

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/image"
	"github.com/garboard-os/garboard/image/components"
	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/google/go-cmp/cmp"
)

// The registry of an existing cluster keeps the versions of Kubernetes that it has: nodes
// may run them.
func TestFurtherKubernetes(t *testing.T) {
	t.Parallel()
	existing := map[string]*qemu.Cluster{"new": {}, "old": {Plan: qemu.Plan{Kubernetes: []string{"v1.36.3", "v1.2.3"}}}}
	other := []string{components.OtherKubernetesVersion}
	for _, tc := range []struct {
		cluster, version string
		want             []string
	}{
		{"new", "", nil},
		{"new", components.KubernetesVersion, nil},
		{"new", "1.35.9", nil}, // from a mirror
		{"new", "1.36.3", other},
		{"new", "v1.36.3", other},
		{"old", "", other},
		{"old", "1.37.2", other},
	} {
		if got := furtherKubernetes(tc.version, existing[tc.cluster]); !slices.Equal(got, tc.want) {
			t.Errorf("cluster %s with %q: %v; want %v", tc.cluster, tc.version, got, tc.want)
		}
	}
}

func TestSelfHostedNeedsANewCluster(t *testing.T) {
	home := t.TempDir()
	t.Setenv("GARBOARD_HOME", home)
	plan := filepath.Join(home, "clusters", "old", "plan.json")
	if err := os.MkdirAll(filepath.Dir(plan), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(plan, []byte(`{"name": "old"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Create(t.Context(), io.Discard, Options{Cluster: qemu.Options{Name: "old", SelfHosted: true}})
	if err == nil || !strings.Contains(err.Error(), "cluster old exists") {
		t.Errorf("error %v", err)
	}
	if err := os.WriteFile(plan, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(t.Context(), io.Discard, Options{Cluster: qemu.Options{Name: "old"}}); err == nil || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("a damaged plan: %v", err)
	}
}

// Nodes boot from a medium of the kind that was asked for, and can upgrade themselves from an installer image with the
// same kernel.
func TestBootFrom(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		o     Options
		want  qemu.Boot
		built []string
	}{
		{Options{}, qemu.Boot{}, nil},
		{Options{UEFI: true}, qemu.Boot{UEFI: true}, nil},
		{Options{Boot: media.ISO}, qemu.Boot{Medium: "iso", Installer: "installer"}, []string{"generic iso", "generic installer"}},
		{Options{Boot: media.Disk, UEFI: true}, qemu.Boot{Disk: "disk", Installer: "installer", UEFI: true}, []string{"cloud disk", "cloud installer"}},
		{Options{Boot: media.PXE}, qemu.Boot{Network: "pxe", Installer: "installer"}, []string{"cloud pxe", "cloud installer"}},
	} {
		var built []string
		got, err := tc.o.bootFrom(func(flavour image.Flavour, kind string) (string, error) {
			built = append(built, string(flavour)+" "+kind)
			return kind, nil
		})
		if diff := cmp.Diff(tc.want, got); err != nil || diff != "" || !slices.Equal(built, tc.built) {
			t.Errorf("%+v: built %q, %v\n%s", tc.o, built, err, diff)
		}
		if kept := bootOf(got); kept != tc.o.Boot {
			t.Errorf("a cluster that was made with --boot %q would keep %q", tc.o.Boot, kept)
		}
	}
	calls := 0
	if _, err := (Options{Boot: media.ISO}).bootFrom(func(image.Flavour, string) (string, error) {
		calls++
		return "", errors.New("no space")
	}); err == nil || calls != 1 {
		t.Errorf("%v after %d builds", err, calls)
	}
}
