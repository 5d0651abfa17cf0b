package qemu

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

func write(t *testing.T, path, text string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A cluster also boots when the cache with its original files is gone.
func TestClusterKeepsWhatItBoots(t *testing.T) {
	t.Parallel()
	cache, d := t.TempDir(), clusterDir(t.TempDir())
	o := Options{
		Boot:   Boot{Kernel: write(t, filepath.Join(cache, "k1", "vmlinuz"), "kernel"), Rootfs: write(t, filepath.Join(cache, "r1"), "root"), Cmdline: "quiet"},
		Images: filepath.Join(cache, "images"),
	}
	write(t, filepath.Join(o.Images, "blobs", "sha256", "abc"), "blob")
	var p Plan
	if err := d.keep(context.Background(), &p, o); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(cache); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		p.Boot.Kernel: "kernel", p.Boot.Rootfs: "root", filepath.Join(p.Images, "blobs", "sha256", "abc"): "blob",
	} {
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("%s holds %q, error %v; want %q", path, got, err, want)
		}
	}
	if p.Boot.Initramfs != "" || p.Boot.Cmdline != "quiet" {
		t.Errorf("kept %+v", p.Boot)
	}
	// A second call with the same plan doesn't need the cache.
	again := p
	if err := d.keep(context.Background(), &again, o); err != nil || again.Source != p.Source {
		t.Errorf("kept again as %s, error %v; want %s", again.Source, err, p.Source)
	}
}

func TestClusterForgetsWhatItBootedBefore(t *testing.T) {
	t.Parallel()
	cache, d := t.TempDir(), clusterDir(t.TempDir())
	var plans [2]Plan
	for i, name := range []string{"one", "two"} {
		o := Options{Boot: Boot{Kernel: write(t, filepath.Join(cache, name, "vmlinuz"), name)}}
		if err := d.keep(context.Background(), &plans[i], o); err != nil {
			t.Fatal(err)
		}
	}
	if plans[0].Source == plans[1].Source {
		t.Fatal("two sources have one name")
	}
	// A node's directory is beside them, and may have a name that begins in the same way.
	plans[1].Nodes = []Node{{Name: "boot-controlplane-1"}}
	disk := write(t, d.file(filepath.Join("boot-controlplane-1", "disk.img")), "all that there is")
	if err := d.forget(plans[1]); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(disk); err != nil {
		t.Errorf("the node's disk: %v", err)
	}
	if _, err := os.Stat(plans[0].Boot.Kernel); !os.IsNotExist(err) {
		t.Errorf("the former kernel: %v", err)
	}
	if _, err := os.Stat(plans[1].Boot.Kernel); err != nil {
		t.Error(err)
	}
}

// A cluster that is off is renewed with the images and the versions that the caller has.
func TestRenewedPlan(t *testing.T) {
	t.Setenv(homeVar, t.TempDir())
	d, err := dirOf("c")
	if err != nil {
		t.Fatal(err)
	}
	former := Plan{Name: "c", Provisioner: Container, Source: "former"}
	write(t, d.plan(), "{}")
	o := Options{Name: "c", Images: t.TempDir(), Kubernetes: []string{"v1.36.3"}}
	if _, err := renew(t.Context(), d, former, o); err != nil {
		t.Fatal(err)
	}
	p, err := readPlan(d)
	if err != nil || len(p.Kubernetes) != 1 || p.Kubernetes[0] != "v1.36.3" || p.Source == former.Source {
		t.Errorf("the renewed plan is %+v, %v", p, err)
	}
}

// After a missing source no partial copy is left.
func TestKeepIsWholeOrNothing(t *testing.T) {
	t.Parallel()
	d := clusterDir(t.TempDir())
	o := Options{Boot: Boot{Kernel: filepath.Join(t.TempDir(), "gone")}}
	if err := d.keep(context.Background(), new(Plan), o); err == nil {
		t.Fatal("no error")
	}
	if left, _ := os.ReadDir(string(d)); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestHostProgramIsKept(t *testing.T) {
	t.Parallel()
	d, program := clusterDir(t.TempDir()), write(t, filepath.Join(t.TempDir(), "dev"), "program")
	self, err := d.keepProgram(t.Context(), []string{program, "--flag"})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(program); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(self[0]); err != nil || string(got) != "program" || self[1] != "--flag" {
		t.Errorf("%v holds %q, error %v", self, got, err)
	}
}
