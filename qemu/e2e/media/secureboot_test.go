//go:build e2e && long

package media

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	imagemedia "github.com/garboard-os/garboard/image/media"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/garboard-os/garboard/qemu/vm"
	"github.com/garboard-os/garboard/tools/testing/owner"
)

// tpmFor returns the lines of a shell that start the TPM of one machine, which ends with QEMU, and QEMU's arguments.
func tpmFor(t *testing.T) (start, args string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "tpm") // the path of a socket has to be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "socket")
	return "swtpm socket --tpm2 --tpmstate dir=" + dir + " --ctrl type=unixio,path=" + socket + " --terminate --daemon || exit",
		"-chardev socket,id=tpm,path=" + socket + " -tpmdev emulator,id=tpm0,chardev=tpm -device tpm-tis,tpmdev=tpm0"
}

// A firmware in setup mode takes the owner's keys from the menu of the medium. From then on it verifies what it starts:
// the signed system installs itself, and the one of the disk is good. The TPM seals the keys of STATE and EPHEMERAL for
// it: each boot of the signed system opens them, and each upgrade.
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
	startTPM, withTPM := tpmFor(t)
	layout, upgrade := e2etest.Installer(t, imagemedia.Options{Args: args, Version: "v2.0.0", Secure: keys})
	e2etest.WrapQEMU(t, `case $* in *pflash*)
  `+startTPM+`
  set -- "$@" -global driver=cfi.pflash01,property=secure,value=on -monitor unix:`+monitor+`,server=on,wait=off `+withTPM+` ;;
esac`, `
  q35) a=q35,smm=on ;;
  *OVMF_CODE_4M.fd) a="${a%.fd}.secboot.fd" ;;`)
	c, m := e2etest.Start(t, "secure-boot", qemu.QEMU, func(o *qemu.Options) {
		o.Boot.Medium, o.Boot.Installer = medium, layout
		o.Unconfigured, o.Boot.UEFI, o.MemoryMiB = true, true, 1536
		o.ControlPlanePatches = [][]byte{[]byte("machine: {type: controlplane, systemDiskEncryption: {state: {keys: [{slot: 0, tpm: {}}]}, ephemeral: {keys: [{slot: 1, tpm: {}}]}}}\n")}
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
	for _, want := range []string{" on ", " integrity ", " as signed ", keys.DB.Cert.Subject.CommonName} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in:\n%s", want, out)
		}
	}
	opened := func(slot string) {
		t.Helper()
		out := c.Gbctl("get", "volumes") + c.Gbctl("get", "security") + c.Gbctl("get", "slots")
		for _, want := range []string{`LUKS2 \(0 tpm\), xfs +true`, `LUKS2 \(1 tpm\), xfs +true`, ` as signed +`, slot} {
			if !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("no %s in:\n%s", want, out)
			}
		}
	}
	opened(` A +\d+ +good +\S+ +yes +yes`)
	c.Gbctl("-n", node, "upgrade", "--image", upgrade)
	if out := c.Gbctl("-n", node, "attest", "--owner", dir); !strings.Contains(out, "it runs a system that the owner of "+dir+" has signed") {
		t.Errorf("attest: %s", out)
	}
	opened(` B +\d+ +good +v2\.0\.0 +yes +yes`)
	m.Reached("the next release has opened the disk")
	c.Gbctl("-n", node, "rollback")
	opened(` A +\d+ +good +\S+ +yes +yes`)
	m.Reached("the former one has, too")
}
