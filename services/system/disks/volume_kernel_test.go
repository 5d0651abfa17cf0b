//go:build kernel

package disks

import (
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/volume"
	"github.com/garboard-os/garboard/tools/testing/loopdisk"
)

// shifted is a layer with the properties of an encrypted one: a header, and a device of its own.
type shifted struct{ dev *os.File }

const shiftedHeader = "shifted by a MiB"

func (*shifted) Describe() string { return "a shifted partition" }

func (s *shifted) On(partition string) (bool, error) {
	f, err := os.Open(partition)
	if err != nil {
		return false, err
	}
	defer f.Close()
	head := make([]byte, len(shiftedHeader))
	_, err = f.ReadAt(head, 0)
	return string(head) == shiftedHeader, err
}

func (s *shifted) Create(_ context.Context, partition string) error {
	f, err := os.OpenFile(partition, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(shiftedHeader), 0)
	return errors.Join(err, f.Sync(), f.Close())
}

func (s *shifted) Open(_ context.Context, partition string) (device string, err error) {
	if there, err := s.On(partition); err != nil || !there {
		return "", errors.Join(errors.New("there is no header"), err)
	}
	if s.dev == nil {
		s.dev, err = loopdisk.Attach(partition, 1<<20)
	}
	if err != nil {
		return "", err
	}
	return s.dev.Name(), nil
}

func (s *shifted) Close() error {
	if s.dev == nil {
		return nil
	}
	dev := s.dev
	s.dev = nil
	return dev.Close()
}

// layered gives every volume of the machine such a layer.
func (m *machineUnderTest) layered() *machineUnderTest {
	for i := range m.disks.volumes {
		m.disks.volumes[i].Layers = slices.Insert(m.disks.volumes[i].Layers, 1, volume.Layer(&shifted{}))
	}
	return m
}

// A layer between partition and file system is made, opened, closed and wiped
// with its volume, and the rest of the service doesn't depend on it.
func TestLayer(t *testing.T) {
	l := newLoop(t, 4*gib)
	m := bootMachine(t, l).layered()
	m.mustUp(config.Install{Disk: l.Path})
	m.write("state/mine", "kept")
	m.write("var/mine", "kept too")
	m.off()
	if slices.ContainsFunc(m.disks.volumes, func(v volume.Volume) bool { return v.Layers[1].(*shifted).dev != nil }) {
		t.Fatal("a layer stays open")
	}

	m = bootMachine(t, l).layered()
	if found, err := m.mountState(); !found || err != nil {
		t.Fatalf("STATE: %v, %v", found, err)
	}
	m.mustUp(config.Install{Disk: l.Path})
	if got := m.read("state/mine") + ", " + m.read("var/mine"); got != "kept, kept too" {
		t.Errorf("after the second boot: %q", got)
	}
	if err := m.disks.MarkWipe([]string{boot.LabelEphemeral}, nil, ""); err != nil {
		t.Fatal(err)
	}
	m.off()
	if err := m.disks.Erase(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, cut := range []string{"format EPHEMERAL", "done", ""} {
		m = bootMachine(t, l).layered()
		m.cut = cut
		if err := m.up(config.Install{Disk: l.Path}); cut == "" && err != nil || cut != "" && !errors.Is(err, errPowerCut) {
			t.Fatalf("cut at %q: %v", cut, err)
		}
		if cut != "" {
			m.off()
		}
	}
	if got := names(t, m.dir, "var"); slices.Contains(got, "mine") || m.read("state/mine") != "kept" {
		t.Errorf("after a reset, /var has %q, STATE %q", got, m.read("state/mine"))
	}
	m.off()

	// Without the layer, its volumes look foreign and are not made again.
	err := bootMachine(t, l).up(config.Install{Disk: l.Path, Wipe: true})
	if err == nil || !strings.Contains(err.Error(), "in its partition STATE, where an xfs file system was") {
		t.Errorf("without the layer: %v", err)
	}
}
