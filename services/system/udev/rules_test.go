package udev

import (
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// array is a disk of a storage array in a tree like sysfs, with its file in one like /dev.
func array(t *testing.T) (r *rules, disk string) {
	t.Helper()
	root := t.TempDir()
	sysfs, dev := filepath.Join(root, "sys"), filepath.Join(root, "dev")
	target := filepath.Join(sysfs, "devices/pci0000:00/host0/target0:0:0/0:0:0:1")
	disk = filepath.Join(target, "block/sda")
	for path, text := range map[string]string{
		target + "/vendor":         "NETAPP  \n",
		target + "/model":          "LUN C-Mode\n",
		target + "/timeout":        "30\n",
		target + "/uevent":         "DEVTYPE=scsi_device\n",
		disk + "/queue/scheduler":  "[mq-deadline] none\n",
		disk + "/queue/rotational": "1\n",
		disk + "/uevent":           "MAJOR=8\nDEVNAME=sda\nDEVTYPE=disk\n",
		dev + "/sda":               "",
		dev + "/taken":             "",
	} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{
		target + "/subsystem": "../bus/scsi", target + "/driver": "../drivers/sd", disk + "/subsystem": "../class/block",
		sysfs + "/class/block/sda": disk, sysfs + "/bus/scsi/devices/0:0:0:1": target,
	} {
		if err := os.MkdirAll(filepath.Dir(link), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, link); err != nil {
			t.Fatal(err)
		}
	}
	return &rules{sysfs: sysfs, dev: dev, log: slog.New(slog.DiscardHandler), links: map[string][]string{}}, disk
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Rules as the manuals of storage arrays have them.
func TestRules(t *testing.T) {
	t.Parallel()
	const scheduler = `, ATTR{queue/scheduler}="none"`
	for rule, want := range map[string]bool{
		`ACTION=="add|change", KERNEL=="sd*[!0-9]", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", ATTRS{vendor}=="NETAPP"` + scheduler: true,
		`ACTION=="change"` + scheduler:                                                false,
		`KERNEL!="sd*"` + scheduler:                                                   false,
		`SUBSYSTEM=="block", DRIVERS=="sd", ATTRS{model}=="LUN*"` + scheduler:         true,
		`SUBSYSTEM=="block", DRIVERS=="sd", ATTRS{model}=="PURE"` + scheduler:         false,
		`SUBSYSTEM=="block", SUBSYSTEMS=="scsi", KERNELS=="0:0:0:*"` + scheduler:      true,
		`SUBSYSTEM=="block", SUBSYSTEMS=="block", ATTRS{vendor}=="N*"` + scheduler:    false, // of two devices
		`SUBSYSTEM=="block", ATTR{queue/rotational}=="1"` + scheduler:                 true,
		`SUBSYSTEM=="block", ATTR{queue/nothing}!="1"` + scheduler:                    false,
		`SUBSYSTEM=="block", ATTRS{vendor}!="NETAPP", SUBSYSTEMS=="scsi"` + scheduler: false,
	} {
		r, disk := array(t)
		r.take([]string{rule})
		r.applyAll()
		if got := content(t, disk+"/queue/scheduler")[:4] == "none"; got != want {
			t.Errorf("%s: applied %v, want %v", rule, got, want)
		}
	}
}

func TestRuleActions(t *testing.T) {
	t.Parallel()
	r, disk := array(t)
	r.take([]string{
		`KERNEL=="sda", MODE="0660", SYMLINK+="arrays/%k", SYMLINK+="taken"`,
		`KERNEL=="0:0:0:1", ATTR{timeout}="180", ATTR{nothing}="1", MODE="0600"`, // it has no file below /dev
	})
	r.applyAll()
	r.applyAll()
	info, err := os.Stat(filepath.Join(r.dev, "arrays/sda"))
	if err != nil || info.Mode().Perm() != 0o660 {
		t.Errorf("%v, %v", info, err)
	}
	if info, err := os.Lstat(filepath.Join(r.dev, "taken")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("what was there is gone: %v, %v", info, err)
	}
	target := filepath.Dir(filepath.Dir(disk))
	if got := content(t, target+"/timeout"); got[:3] != "180" {
		t.Errorf("the timeout is %q", got)
	}
	if _, err := os.Stat(target + "/nothing"); err == nil {
		t.Error("a file was made in sysfs")
	}
	r.event(Uevent{Action: "remove", DevPath: disk[len(r.sysfs):]})
	if _, err := os.Lstat(filepath.Join(r.dev, "arrays/sda")); err == nil {
		t.Error("the link is there, and its device is gone")
	}
}

// Rules are applied to the existing devices when they change, and to those that come later.
func TestRulesChange(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r, disk := array(t)
		store, events := resource.NewStore(), make(chan Uevent)
		done := make(chan struct{})
		go func() { r.follow(t.Context(), store, events); close(done) }()
		configure := func(rules ...string) {
			c := &config.Config{Machine: config.Machine{Udev: config.Udev{Rules: rules}}}
			if err := configuration.Configs.Put(store.As("test"), configuration.ConfigID, c); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		mode := func() fs.FileMode {
			info, err := os.Stat(filepath.Join(r.dev, "sda"))
			if err != nil {
				t.Fatal(err)
			}
			return info.Mode().Perm()
		}
		configure(`ACTION=="add", KERNEL=="sda", MODE="0640"`)
		if mode() != 0o640 {
			t.Errorf("an existing device has %o", mode())
		}
		configure(`ACTION=="change", KERNEL=="sda", MODE="0666"`)
		if mode() != 0o640 {
			t.Errorf("a device that hasn't changed has %o", mode())
		}
		events <- Uevent{Action: "change", DevPath: disk[len(r.sysfs):]}
		synctest.Wait()
		if mode() != 0o666 {
			t.Errorf("a changed device has %o", mode())
		}
		close(events)
		<-done
	})
}
