package config

import (
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/garboard-os/garboard/config/pki"
)

// maxKeyFile bounds a file of one certificate or key, in bytes.
const maxKeyFile = 64 << 10

// KubernetesSecrets takes the authorities and the service account's key of an
// existing cluster from the folder where kubeadm keeps them, and makes the
// other secrets except the cluster's secret. That one encrypts Secrets in etcd,
// and the existing API servers could no longer read them. All that is missing
// or broken in the folder is reported at once.
func KubernetesSecrets(dir fs.FS, now time.Time) (*Secrets, error) {
	s, err := NewSecrets(now)
	if err != nil {
		return nil, err
	}
	s.ClusterSecret = ""
	var missing, errs []error
	read := func(name string) []byte {
		data, err := readSmall(dir, name)
		if errors.Is(err, fs.ErrNotExist) {
			missing = append(missing, errors.New(name+" is missing"))
		} else if err != nil {
			errs = append(errs, err)
		}
		return data
	}
	for _, a := range []struct {
		name string
		to   *CertKey
	}{{"ca", &s.KubernetesCA}, {"front-proxy-ca", &s.AggregatorCA}, {"etcd/ca", &s.EtcdCA}} {
		*a.to = CertKey{Crt: read(a.name + ".crt"), Key: read(a.name + ".key")}
		if len(a.to.Crt) == 0 || len(a.to.Key) == 0 {
			continue
		}
		if cert, _, err := a.to.CA().Parse(); err != nil {
			errs = append(errs, fmt.Errorf("%s.crt and .key: %w", a.name, err))
		} else if !now.Before(cert.NotAfter) {
			errs = append(errs, fmt.Errorf("%s.crt has expired on %s", a.name, cert.NotAfter.Format(time.DateOnly)))
		}
	}
	if s.ServiceAccount = read("sa.key"); len(s.ServiceAccount) > 0 {
		if _, err := pki.ParseKey(s.ServiceAccount); err != nil {
			errs = append(errs, fmt.Errorf("sa.key: %w", err))
		}
	}
	if errs = append(missing, errs...); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return s, nil
}

func readSmall(dir fs.FS, name string) ([]byte, error) {
	info, err := fs.Stat(dir, name)
	if err == nil && info.Size() > maxKeyFile {
		err = fmt.Errorf("%s has %d bytes, too many for a certificate or key", name, info.Size())
	}
	if err != nil {
		return nil, err
	}
	data, err := fs.ReadFile(dir, name)
	if err == nil && len(data) == 0 {
		err = fmt.Errorf("%s is empty", name)
	}
	return data, err
}
