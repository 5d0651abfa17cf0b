//go:build kernel

package disks

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/diskfs/go-diskfs/partition/gpt"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/disk"
	"golang.org/x/sys/unix"
)

// numbered gives the machine's disks serial numbers.
func (m *machineUnderTest) numbered() *machineUnderTest {
	m.disks.Keeper.Disks.Serial = func(name string) string { return "serial of " + name }
	return m
}

// theirs is a disk with a partition, and a secret at its edge and in its middle.
func theirs(t *testing.T) *loop {
	t.Helper()
	l := newLoop(t, gib)
	putTable(t, l, table(&gpt.Partition{Index: 1, Name: "data", Type: gpt.LinuxFilesystem, Start: 8 << 20 / 512, End: 900<<20/512 - 1}))
	l.WriteAt(8<<20+4096, "the secret of the user")
	l.WriteAt(500<<20, "the secret of the user")
	unix.Sync()
	if !l.kept() {
		t.Fatal("the secret isn't on the disk")
	}
	return l
}

func (l *loop) kept() bool { l.t.Helper(); return l.Holds("the secret of the user") }

// the user's disks are wiped before the system's, during the shutdown, or
// else by the next boot.
func TestUserDisksAreWiped(t *testing.T) {
	for name, tt := range map[string]struct {
		cut      string
		nameless bool // without serial numbers
		gone     bool // at the next boot
		late     bool
		wiped    bool
		says     string
	}{
		"on the way out":               {wiped: true},
		"without a serial number":      {nameless: true, wiped: true},
		"by the next boot":             {cut: "wipe a user's disk", wiped: true},
		"system disk by the next boot": {cut: "wipe STATE", wiped: true},
		"not to be known again":        {cut: "wipe a user's disk", nameless: true},
		"not there at the next boot":   {cut: "wipe a user's disk", gone: true, says: "NOT wiped: 0 of the disks"},
		"late at the next boot":        {cut: "wipe a user's disk", late: true, wiped: true},
	} {
		t.Run(name, func(t *testing.T) {
			system, other, user := newLoop(t, 4*gib), theirs(t), theirs(t)
			m := bootMachine(t, system, other, user)
			if !tt.nameless {
				m.numbered()
			}
			m.mustUp(config.Install{Disk: system.Path})
			m.write("state/key", "the secret of STATE")
			users, err := m.disks.UserDisks([]string{user.Path})
			if err != nil {
				t.Fatal(err)
			}
			if err := m.disks.MarkWipe([]string{boot.LabelState}, users, ""); err != nil {
				t.Fatal(err)
			}
			m.off()
			m.cut = tt.cut
			if err := m.disks.Erase(t.Context()); tt.cut != "" && !errors.Is(err, errPowerCut) || tt.cut == "" && err != nil {
				t.Fatal(err)
			}
			there := []*loop{system, other, user}
			if tt.gone {
				there = there[:2]
			}
			again := bootMachine(t, there...)
			if !tt.nameless {
				again.numbered()
			}
			if all := again.disks.Keeper.Disks.Is; tt.late {
				again.disks.Keeper.Disks.Began = time.Now()
				again.disks.Keeper.Disks.Is = func(name string) bool { return all(name) && name != user.Name }
				if state, err := again.disks.MountState(t.Context()); state != configuration.StateWiping || err == nil || !strings.Contains(err.Error(), "waits for 1 disks that a reset was to wipe") {
					t.Errorf("the next boot doesn't wait: %v", err)
				}
				again.disks.Keeper.Disks.Is = all
			}
			if found, err := again.mountState(); found || err != nil {
				t.Errorf("the next boot finds STATE: %v, %v", found, err)
			}
			if user.kept() == tt.wiped || !other.kept() || system.Holds("the secret of STATE") {
				t.Errorf("the user's disk has its secret: %v, the other one: %v, STATE: %v", user.kept(), other.kept(), system.Holds("the secret of STATE"))
			}
			if !strings.Contains(again.console.String(), tt.says) {
				t.Errorf("the next boot doesn't say %q:\n%s", tt.says, again.console)
			}
		})
	}
}

// On a disk that can't zero by itself, the metadata of the file systems is erased.
func TestUserDiskWithoutHelpOfTheDisk(t *testing.T) {
	l := theirs(t)
	parts := l.device().Partitions()
	if len(parts) != 1 || parts[0].Start != 8<<20 || parts[0].Size != 892<<20 {
		t.Fatalf("%+v", parts)
	}
	l.Change(func(dev *os.File) error {
		return errors.Join(parts[0].EraseEdges(t.Context(), dev), disk.Partition{Size: gib}.EraseEdges(t.Context(), dev), dev.Sync())
	})
	if f := l.device(); f.Verdict != disk.Empty {
		t.Errorf("it holds %s", f.Holds)
	}
}

// Only disks that are named, exist and aren't in use are wiped.
func TestUserDisksThatAreRefused(t *testing.T) {
	system, user, mounted := newLoop(t, 4*gib), theirs(t), newLoop(t, gib)
	m := bootMachine(t, system, user, mounted).numbered()
	if _, err := m.disks.UserDisks([]string{user.Path}); err == nil || !strings.Contains(err.Error(), "doesn't know its system disk") {
		t.Errorf("without a system disk: %v", err)
	}
	m.mustUp(config.Install{Disk: system.Path})
	if out, err := exec.Command("mkfs.xfs", "-q", mounted.Path).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mountAt := func(dir string) {
		t.Helper()
		dir = filepath.Join(m.dir, dir)
		if err := errors.Join(os.MkdirAll(dir, 0o755), unix.Mount(mounted.Path, dir, "xfs", 0, "")); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	}
	part := user.device().Partitions()[0].Path
	link := filepath.Join(m.dir, "by-id")
	if err := os.Symlink(user.Path, link); err != nil {
		t.Fatal(err)
	}

	// Pods and their volumes end with the node.
	mountAt("var/lib/kubelet/pods/web")
	users, err := m.disks.UserDisks([]string{link, mounted.Path, user.Path})
	if err != nil || len(users) != 2 || users[0].Path != user.Path || users[1].Path != mounted.Path || users[0].Serial != "serial of "+user.Name {
		t.Errorf("%v, %v", users, err)
	}
	mountAt("elsewhere")
	for name, want := range map[string]string{
		system.Path:     "is the system disk",
		mounted.Path:    "is in use: " + mounted.Name + " is mounted on " + filepath.Join(m.dir, "elsewhere"),
		part:            "is a partition. Name the whole disk",
		"/dev/nothing":  "there is no disk /dev/nothing. The disks here:\nDEVICE",
		user.Name:       "there is no disk " + user.Name,
		"/dev/null":     "/dev/null is no disk",
		link + "/other": "there is no disk",
	} {
		if _, err := m.disks.UserDisks([]string{user.Path, name}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	m.disks.o.Mode = boot.Container
	if _, err := m.disks.UserDisks([]string{user.Path}); err == nil || !strings.Contains(err.Error(), "no disks of its own") {
		t.Errorf("in a container: %v", err)
	}
	if users, err := m.disks.UserDisks(nil); users != nil || err != nil {
		t.Errorf("none: %v, %v", users, err)
	}
}
