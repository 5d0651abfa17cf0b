//go:build e2e && long

package media

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/osthread"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/garboard-os/garboard/tools/testing/eventually"
	"github.com/google/go-containerregistry/pkg/registry"
)

const (
	// storage is this machine in the nodes' network, with a target of iSCSI.
	storage = "10.5.0.1:3260"
	target  = "iqn.2026-01.test:disk"
)

// The examples of extensions on a machine that installs itself from an ISO with them, which a UEFI boots from a stick.
// The configuration is in a further partition of the stick. The guest agent answers the hypervisor, and another
// extension's service, which waits for that of iscsi-tools, makes a disk of a real target. Settings of machine.sysfs
// are made, also for that disk, which comes later. An extension whose device isn't there waits, says for what, and
// holds up nothing.
func TestExtensions(t *testing.T) {
	store, work := httptest.NewServer(registry.New()), t.TempDir()
	t.Cleanup(store.Close)
	base, _ := e2etest.Installer(t, media.Options{Args: args, Version: "v1.0.0"})
	from := strings.TrimPrefix(store.URL, "http://") + "/garboard-os/installer:v1.0.0"
	push(t, base, from)

	made := e2etest.Extensions(t)
	owner := filepath.Join(work, "owner")
	if out, err := e2etest.UserGbctl(t, customizeBudget, "gen", "release-key", "--name", owner); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	public, err := os.ReadFile(owner + ".pub")
	if err != nil {
		t.Fatal(err)
	}
	flags := []string{"image", "build", "--from", from, "--key", owner + ".key", "--extra-kernel-arg", "garboard.config=metal-iso", "--extension", made["iscsi-tools"], "--extension", made["guest-agent"]}
	for name, service := range map[string]string{
		"login": `command: [/usr/sbin/iscsiadm, --mode, discoverydb, --type, sendtargets, --portal, "` + storage + `", --discover, --login]
  dependsOn: [ext-iscsi-tools]
  restart: onFailure
  privileged: true
  mounts: [{source: /usr/lib/modules}, {source: /run/lock}, {source: /var/lib/iscsi}, {source: /var/lib/iscsi, destination: /etc/iscsi}]`,
		"waiting": "command: [/usr/sbin/iscsiadm]\n  waitFor: [/dev/nothing]",
	} {
		dir := filepath.Join(work, name)
		if err := os.CopyFS(dir, os.DirFS(made["iscsi-tools"])); err != nil {
			t.Fatal(err)
		}
		manifest := fmt.Sprintf("name: %s\nversion: \"1\"\ndescription: a test\nservice:\n  %s\n", name, service)
		e2etest.WriteFile(t, filepath.Join(dir, "extension.yaml"), []byte(manifest))
		flags = append(flags, "--extension", dir)
	}
	iso := filepath.Join(work, "iso")
	if out, err := e2etest.UserGbctl(t, customizeBudget, append(flags, "--kind", "iso="+iso)...); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	short, err := os.MkdirTemp("", "garboard-agent-") // the path of a socket has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(short) })
	agent := filepath.Join(short, "socket")
	c, m := e2etest.Start(t, "extensions", qemu.QEMU, e2etest.Nodes(1, 0), func(o *qemu.Options) {
		o.DiskGiB, o.Boot.Medium, o.Boot.UEFI, o.Hardware = diskGiB, iso, true, []vm.Hardware{{Agent: agent, Medium: vm.Stick}}
		o.Unconfigured, o.Prepare = true, func(node string) error { return addConfiguration(iso, filepath.Join(node, "config.yaml")) }
		o.ControlPlanePatches = [][]byte{[]byte(`machine:
  install: {keys: [` + strings.Split(string(public), "\n")[1] + `]}
  sysctls: {vm.nr_hugepages: "4"}
  sysfs: {block/vda/queue/read_ahead_kb: "256", block/sdb/queue/read_ahead_kb: "512"}`)}
	})
	c.Says(bootBudget, 0, "machined", "configuration from kernel argument")
	m.Reached("the configuration on the stick")
	serveDisk(t, c.Network(), work)
	c.Ready(m)
	m.Reached("the node is Ready")
	if got := c.Kubectl("get", "nodes", "-o", "jsonpath={.items[*].status.allocatable.hugepages-2Mi}"); got != "8Mi" {
		t.Errorf("pods can have %q of huge pages", got)
	}

	if got := c.Gbctl("-n", c.Node(), "get", "extensions"); strings.Count(got, "\n") != 5 || !strings.Contains(got, "ext-iscsi-tools") {
		t.Errorf("extensions:\n%s", got)
	}
	c.Eventually(bootBudget, "the target is a disk", func() error {
		out, err := c.TryGbctl("-n", c.Node(), "disks")
		if err == nil && !strings.Contains(out, "VIRTUAL-DISK") {
			err = errors.New(out)
		}
		return err
	})
	m.Reached("the disk of the target is there")
	for device, want := range map[string]string{"vda": "256", "sdb": "512"} {
		c.Eventually(bootBudget, "the setting of "+device, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "read", "/sys/block/"+device+"/queue/read_ahead_kb")
			if err == nil && strings.TrimSpace(out) != want {
				err = errors.New(out)
			}
			return err
		})
	}
	if got := c.Gbctl("-n", c.Node(), "ls", "/dev/disk/by-id"); !strings.Contains(got, "virtio-") || !strings.Contains(got, "wwn-0x") {
		t.Errorf("links to disks:\n%s", got)
	}
	id := strings.TrimSpace(c.Gbctl("-n", c.Node(), "read", "/etc/machine-id"))
	if got := c.Gbctl("-n", c.Node(), "read", "/var/lib/iscsi/initiatorname.iscsi"); got != "InitiatorName=iqn.2026-01.dev.garboard:"+id+"\n" {
		t.Errorf("the name of the initiator is %q", got)
	}
	services := c.Gbctl("-n", c.Node(), "services")
	for name, want := range map[string]string{"ext-iscsi-tools": "Running", "ext-guest-agent": "Running", "ext-login": "Finished", "ext-waiting": "Waiting"} {
		if !strings.Contains(lineOf(services, name), want) {
			t.Errorf("%s isn't %s:\n%s", name, want, services)
		}
	}
	if got := c.Gbctl("-n", c.Node(), "service", "ext-waiting"); !strings.Contains(got, `file "/dev/nothing" to exist`) {
		t.Errorf("what waits doesn't say for what:\n%s", got)
	}

	if got := ask(t, agent, "guest-network-get-interfaces"); !strings.Contains(got, c.Nodes[0].Address.String()) {
		t.Errorf("the agent has other addresses: %s", got)
	}
	if got := ask(t, agent, "guest-get-osinfo"); !strings.Contains(got, "Garboard") {
		t.Errorf("the agent has another system: %s", got)
	}
	m.Reached("the guest agent answers")
}

// addConfiguration adds a partition with the configuration to the disk that an ISO was written to, as the manual says.
func addConfiguration(disk, configuration string) error {
	text, err := os.ReadFile(configuration)
	if err != nil {
		return err
	}
	info, err := os.Stat(disk)
	if err != nil {
		return err
	}
	if err := os.Truncate(disk, info.Size()+2*volumeSize); err != nil {
		return err
	}
	cmd := exec.Command("sfdisk", "--append", disk)
	cmd.Stdin = strings.NewReader(fmt.Sprintf("start=%d, size=64MiB, type=L\n", info.Size()/512))
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("sfdisk: %w: %s", err, out)
	}
	return writeVolume(disk, info.Size(), "METAL-ISO", map[string][]byte{"/config.yaml": text})
}

func lineOf(table, word string) string {
	for line := range strings.Lines(table) {
		if strings.Contains(line, " "+word+" ") {
			return line
		}
	}
	return ""
}

// serveDisk runs a target of iSCSI with one disk.
func serveDisk(t *testing.T, inside *osthread.Thread, work string) {
	t.Helper()
	image := filepath.Join(work, "target")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 64<<20)); err != nil {
		t.Fatal(err)
	}
	e2etest.Run(t, inside, "tgtd", "--foreground", "--control-port", "7", "--iscsi", "portal="+storage)
	for _, command := range [][]string{
		{"--op", "new", "--mode", "target", "--tid", "1", "--targetname", target},
		{"--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1", "--backing-store", image},
		{"--op", "bind", "--mode", "target", "--tid", "1", "--initiator-address", "ALL"},
	} {
		eventually.That(t, customizeBudget, "the target is made", func() error {
			out, err := exec.Command("tgtadm", append([]string{"--control-port", "7", "--lld", "iscsi"}, command...)...).CombinedOutput()
			if err != nil {
				return fmt.Errorf("tgtadm %v: %w: %s", command, err, out)
			}
			return nil
		})
	}
}

// ask asks the guest agent over its channel.
func ask(t *testing.T, socket, command string) string {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(customizeBudget)); err != nil {
		t.Fatal(err)
	}
	question, err := json.Marshal(map[string]string{"execute": command})
	if err == nil {
		_, err = conn.Write(append(question, '\n'))
	}
	if err != nil {
		t.Fatal(err)
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		t.Fatalf("%s: %v", command, err)
	}
	return answer
}
