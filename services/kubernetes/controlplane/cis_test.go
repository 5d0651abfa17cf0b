package controlplane

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	"github.com/garboard-os/garboard/services/kubernetes/kubeclient"
	"github.com/garboard-os/garboard/services/kubernetes/secrets"
	"github.com/garboard-os/garboard/tools/testing/cis"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

// The files that the controllers write on a control plane, with all certificates and keys.
func TestCIS(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: files are given to the users of programs")
	}
	t.Setenv("TMPDIR", "/var/tmp") // the audit log is below /var
	f := start(t, testConfig(t))
	f.etcd(true)
	put(t, os.WriteFile(f.path("subnet.env"), []byte("FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.3.1/24\nFLANNEL_MTU=1450\n"), 0o600))
	for _, path := range append([]string{f.path("cni", cniFile)}, f.file(apiServer), f.file(controllerManager), f.file(scheduler)) {
		eventually.That(t, patience, path, func() error { _, err := os.Stat(path); return err })
	}
	for _, id := range []string{secrets.EtcdID, secrets.KubeletID} {
		eventually.That(t, patience, "secrets of "+id, func() error { _, err := secrets.Statuses.Get(f.store, id); return err })
	}
	users := map[int]string{}
	for _, program := range append([]string{etcd.ID}, Programs...) {
		users[boot.User(program)] = program
	}
	node := cis.Node{Commands: map[string][]string{}, Files: map[string]cis.File{}}
	for here, there := range map[string]string{"static-pods": boot.StaticPodsDir, "files": filesDir, "secrets": boot.SecretsDir, "cni": boot.CNIConfDir} {
		put(t, filepath.WalkDir(f.path(here), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			info, err := entry.Info()
			if err != nil {
				return err
			}
			data, err := os.ReadFile(path)
			user := users[int(info.Sys().(*syscall.Stat_t).Uid)]
			node.Files[there+strings.TrimPrefix(path, f.path(here))] = cis.File{Mode: info.Mode(), User: user, Content: data}
			return err
		}))
	}
	for _, program := range Programs {
		var pod map[string]any
		put(t, yaml.Unmarshal(node.Files[boot.StaticPodsDir+"/"+filepath.Base(f.file(program))].Content, &pod))
		for _, arg := range kubeclient.Object(pod).List("spec", "containers")[0]["command"].([]any) {
			node.Commands[program] = append(node.Commands[program], arg.(string))
		}
	}
	cis.Check(t, "control plane", node)
	// The secrets of each program, and what the API server reads and writes, are of its user alone.
	for name, f := range node.Files {
		dir := filepath.Dir(name)
		want := filepath.Base(dir)
		if dir != filesDir+"/"+apiServer && dir != boot.SecretsDir+"/etcd" && filepath.Dir(dir) != boot.SecretsDir+"/kubernetes" {
			want = ""
		}
		if f.User != want || f.Mode.Perm() != 0o600 {
			t.Errorf("%s belongs to %q, with the mode %s, want %q", name, f.User, f.Mode, want)
		}
	}
	for _, program := range Programs {
		info, err := os.Stat(f.path("secrets", "kubernetes", program))
		put(t, err)
		if st := info.Sys().(*syscall.Stat_t); users[int(st.Uid)] != program || info.Mode().Perm() != 0o700 {
			t.Errorf("the secrets of %s belong to user %d, with the mode %s", program, st.Uid, info.Mode())
		}
	}
	info, err := os.Stat(f.path("audit"))
	put(t, err)
	if uid := info.Sys().(*syscall.Stat_t).Uid; users[int(uid)] != apiServer {
		t.Errorf("the audit log belongs to user %d", uid)
	}
}
