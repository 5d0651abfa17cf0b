package secrets

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/kubernetes/balancer"
)

const (
	fileMode = 0o600 // of the program's own user
	dirMode  = 0o700
	// versionSize: half a SHA-256 is more than enough to detect a change.
	versionSize = 16
)

// file is a file for a program.
type file struct {
	data []byte
	// renewed: its program reads it again by itself, so that a new content needs
	// no restart. These are the leaf certificates and their keys, and the authorities of the
	// aggregation layer. etcd reads them at each handshake, the control plane's programs and
	// the kubelet watch them.
	renewed bool
}

// leaf is the two files of a pair, NAME.crt and NAME.key.
func leaf(files map[string]file, name string, pair config.CertKey) {
	files[name+".crt"], files[name+".key"] = file{pair.Crt, true}, file{pair.Key, true}
}

// FilesController writes secrets where programs read them: in the secrets folder,
// one folder for each status.
type FilesController struct{ dir string }

func (c *FilesController) Reconcile(_ context.Context, v resource.View) (time.Duration, error) {
	return 0, errors.Join(
		writeFiles(v, c.dir, KubernetesID, Kubernetes, kubernetesFiles),
		writeFiles(v, c.dir, EtcdID, Etcd, etcdFiles),
		writeFiles(v, c.dir, KubeletID, Kubelet, kubeletFiles),
	)
}

// writeFiles writes the files of a kind, if there are secrets of it, and publishes which they are.
func writeFiles[S any](v resource.View, dir, id string, kind *resource.Kind[S], of func(S) (map[string]file, map[string]string, error)) error {
	o, err := kind.Get(v, id)
	if err != nil {
		return resource.IgnoreNotFound(err)
	}
	files, authorities, err := of(o.Spec)
	if err == nil {
		err = writeAll(filepath.Join(dir, id), files)
	}
	if err == nil {
		err = Statuses.Put(v, id, StatusSpec{Version: version(files), Programs: programVersions(files), Authorities: authorities})
	}
	return err
}

func etcdFiles(s EtcdSpec) (map[string]file, map[string]string, error) {
	files := map[string]file{"ca.crt": {data: s.CA}}
	leaf(files, "server", s.Server)
	leaf(files, "peer", s.Peer)
	return files, s.Authorities, nil
}

// kubeletFiles leaves out the kubelet's client certificate: that one is only
// its first, and the kubelet itself keeps and renews it.
func kubeletFiles(s KubeletSpec) (map[string]file, map[string]string, error) {
	files := map[string]file{"ca.crt": {data: s.CA}}
	if len(s.Serving.Crt) > 0 {
		leaf(files, "serving", s.Serving)
	}
	return files, s.Authorities, nil
}

func kubernetesFiles(s KubernetesSpec) (map[string]file, map[string]string, error) {
	encryption, err := encryptionConfig(s.EncryptionKeys)
	if err != nil {
		return nil, nil, err
	}
	files := map[string]file{
		"kube-apiserver/ca.crt":                       {data: s.Trusted},
		"kube-apiserver/etcd-client-ca.crt":           {data: s.EtcdCA},
		"kube-apiserver/aggregator-ca.crt":            {data: s.AggregatorCA, renewed: true},
		"kube-apiserver/service-account.pub":          {data: s.ServiceAccount.Crt},
		"kube-apiserver/service-account.key":          {data: s.ServiceAccount.Key},
		"kube-apiserver/encryption.yaml":              {data: encryption},
		"kube-controller-manager/ca.crt":              {data: s.CA.Crt},
		"kube-controller-manager/ca.key":              {data: s.CA.Key},
		"kube-controller-manager/root-ca.crt":         {data: s.Trusted},
		"kube-controller-manager/service-account.key": {data: s.ServiceAccount.Key},
	}
	leaf(files, "kube-apiserver/apiserver", s.APIServer)
	leaf(files, "kube-apiserver/apiserver-kubelet-client", s.KubeletClient)
	leaf(files, "kube-apiserver/etcd-client", s.EtcdClient)
	leaf(files, "kube-apiserver/front-proxy-client", s.FrontProxy)
	for program, pair := range map[string]config.CertKey{"kube-controller-manager": s.ControllerManager, "kube-scheduler": s.Scheduler} {
		leaf(files, program+"/client", pair)
		text, err := kubeconfig(s.Balancer, s.Trusted, program)
		if err != nil {
			return nil, nil, err
		}
		files[program+"/kubeconfig"] = file{data: text}
	}
	return files, s.Authorities, nil
}

// kubeconfig is a client configuration that refers to its certificate's files,
// in the same directory: a program would never read embedded certificates again.
func kubeconfig(server string, ca []byte, user string) ([]byte, error) {
	return yaml.Marshal(config.KubeconfigOf("local", map[string]any{
		"server": server, "tls-server-name": balancer.ServerName, "certificate-authority-data": base64.StdEncoding.EncodeToString(ca),
	}, user, map[string]any{"client-certificate": "client.crt", "client-key": "client.key"}))
}

// encryptionConfig makes the apiserver encrypt Secrets. The last provider is
// for reading Secrets that were written before there was a key. All keys have the name that
// earlier releases know: the apiserver tries each provider, and what another one than the first
// can read is written anew at the next change, also at one that changes nothing.
func encryptionConfig(keys []config.KeyPEM) ([]byte, error) {
	var providers []any
	for _, key := range keys {
		secretbox := map[string]any{"keys": []any{map[string]any{"name": "key1", "secret": base64.StdEncoding.EncodeToString(key)}}}
		providers = append(providers, map[string]any{"secretbox": secretbox})
	}
	providers = append(providers, map[string]any{"identity": map[string]any{}})
	return yaml.Marshal(map[string]any{
		"apiVersion": "apiserver.config.k8s.io/v1",
		"kind":       "EncryptionConfiguration",
		"resources":  []any{map[string]any{"resources": []any{"secrets"}, "providers": providers}},
	})
}

// writeAll writes the files that differ. Each file is replaced atomically, and belongs to the
// user of the program that its folder is named after.
func writeAll(dir string, files map[string]file) error {
	for _, path := range slices.Sorted(maps.Keys(files)) {
		full := filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(full), dirMode); err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
		uid := boot.Owner(filepath.Base(filepath.Dir(full)))
		if err := os.Lchown(filepath.Dir(full), uid, uid); err != nil {
			return fmt.Errorf("write secrets: %w", err)
		}
		if have, err := os.ReadFile(full); err == nil && bytes.Equal(have, files[path].data) {
			continue
		}
		if err := boot.WriteFileFor(uid, full, files[path].data, fileMode); err != nil {
			return err
		}
	}
	return nil
}

// programVersions are the versions of the files of each program, in its folder.
func programVersions(files map[string]file) map[string]string {
	versions := map[string]string{}
	for path := range files {
		if program, _, inside := strings.Cut(path, "/"); inside && versions[program] == "" {
			own := maps.Clone(files)
			maps.DeleteFunc(own, func(other string, _ file) bool { return !strings.HasPrefix(other, program+"/") })
			versions[program] = version(own)
		}
	}
	return versions
}

// version is a hash of the files that programs read only at their start.
func version(files map[string]file) string {
	h := sha256.New()
	for _, path := range slices.Sorted(maps.Keys(files)) {
		if f := files[path]; !f.renewed {
			fmt.Fprintf(h, "%s %d\n", path, len(f.data))
			h.Write(f.data)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:versionSize])
}
