//go:build e2e && long

package media

import (
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/garboard-os/garboard/tools/testing/owner"
)

// A firmware in setup mode takes the owner's keys from the menu of the medium. From then on it verifies what it starts:
// the signed system installs itself, and the one of the disk is good.
func TestSecureBoot(t *testing.T) {
	dir, keys := owner.Keys(t)
	medium, monitor := filepath.Join(t.TempDir(), "signed.iso"), filepath.Join(t.TempDir(), "monitor")
	build := []string{"media", "build", "iso", "--sign", dir, "--output-file", medium}
	for _, arg := range args {
		build = append(build, "--extra-kernel-arg", arg)
	}
	if out, err := e2etest.UserGbctl(t, systemBudget, build...); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	e2etest.WrapQEMU(t, `case $* in *pflash*)
  set -- "$@" -global driver=cfi.pflash01,property=secure,value=on -monitor unix:`+monitor+`,server=on,wait=off ;;
esac`, `
  q35) a=q35,smm=on ;;
  *OVMF_CODE_4M.fd) a="${a%.fd}.secboot.fd" ;;`)
	c, m := e2etest.Start(t, "secure-boot", qemu.QEMU, func(o *qemu.Options) {
		o.Boot.Medium = medium
		o.Unconfigured, o.Boot.UEFI, o.MemoryMiB = true, true, 1536
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane}\n")}
		o.Hardware = []vm.Hardware{{NIC: "e1000", Disk: vm.SATA}}
	})
	shows := func(text string) { // a menu has no ends of lines
		c.Eventually(bootBudget, "the console has "+text, func() error {
			if !strings.Contains(string(c.Text()), text) {
				return errors.New("it hasn't")
			}
			return nil
		})
	}
	shows("Enroll Secure Boot keys: auto")
	menu, err := net.Dial("unix", monitor)
	if err == nil {
		_, err = io.WriteString(menu, "sendkey down\nsendkey down\nsendkey ret\n")
	}
	if err != nil {
		t.Fatal(err)
	}
	shows("keys successfully enrolled")
	menu.Close()
	m.Reached("the firmware has the keys")
	node := c.Nodes[0].Address.String()
	line := c.Says(2*bootBudget, 0, "maintenance mode: API at https://"+node)
	m.Reached("maintenance mode of the signed system")

	before := len(c.Text())
	_, command, _ := strings.Cut(line.Text, "apply a configuration with: gbctl ")
	c.Gbctl(strings.Fields(strings.Replace(command, "FILE", c.Configuration(c.Node()), 1))...)
	c.Says(3*bootBudget, before, "runs from slot A, which is trying")
	c.Says(bootBudget, before, "slot A is good")
	m.Reached("the signed system of the disk is good")
	out := c.Gbctl("get", "security")
	for _, want := range []string{" on ", " integrity ", keys.DB.Cert.Subject.CommonName} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
}
